"""Models, their conversion to block low-rank structures, and where their weights come from.

Importing this package, or :mod:`model_zoo.registry`, imports neither torch, diffusers nor timm.
"""
