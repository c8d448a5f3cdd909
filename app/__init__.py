"""BLR Lab: dense, compiled and block low-rank models side by side.

Importing this package, or `app.engine`, imports neither torch, diffusers, timm nor gradio.
"""
