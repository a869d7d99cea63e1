"""The native extension; all metadata is in setup.cfg."""

import os
from glob import glob

from setuptools import Extension, setup

# SHMCOLLECT_SANITIZE=address,undefined builds the extension for `make sanitize`; whatever is found ends the process.
sanitize = os.environ.get("SHMCOLLECT_SANITIZE")
checks = [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-fno-wrapv", "-fno-omit-frame-pointer", "-g", "-O1"]

setup(
    ext_modules=[
        Extension(
            "shmcollect._native",
            sources=sorted(glob("shmcollect/*.c")),
            depends=sorted(glob("shmcollect/*.h")),
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            extra_compile_args=[
                *("-std=c11", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wshadow", "-Werror"),
                *(checks if sanitize else ["-O2"]),
            ],
            extra_link_args=["-pthread", *([f"-fsanitize={sanitize}"] if sanitize else [])],
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
