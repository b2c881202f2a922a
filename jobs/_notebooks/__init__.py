"""Plots and tables of the notebooks, so that cells only call them. Only this package imports matplotlib."""
