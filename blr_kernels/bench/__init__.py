"""Measures single layers on a GPU: cases, timing, one report as JSON, and plots of it."""
