"""Plots and tables of the notebooks, so that cells only call them. matplotlib is imported here and nowhere else."""
