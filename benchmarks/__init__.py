"""Throughput of the collector beside an ideal and Gymnasium's vector envs, on workloads of known cost."""
