"""Tuned launch configs: where they are found, and the search that makes them.

``python -m blr_kernels.tuning --help`` says how to tune for the GPU at hand. A call of a layer only
looks configs up; it never searches for one.
"""
