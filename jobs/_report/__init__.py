"""Pages of reports as one HTML file each, and the parts of them that notebooks show too."""
