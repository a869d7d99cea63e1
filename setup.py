"""The native extension; all metadata is in setup.cfg."""

import os

from setuptools import Extension, setup

# SHMCOLLECT_SANITIZE=address,undefined builds the extension for `make sanitize`.
sanitize = os.environ.get("SHMCOLLECT_SANITIZE")
extra = [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-g", "-O1"] if sanitize else ["-O2"]

setup(
    ext_modules=[
        Extension(
            "shmcollect._native",
            sources=["shmcollect/_native.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            extra_compile_args=["-std=c11", "-Wall", "-Wextra", "-Wshadow", "-Werror", *extra],
            extra_link_args=["-pthread", *([f"-fsanitize={sanitize}"] if sanitize else [])],
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
