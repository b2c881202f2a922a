"""The files of a store: the one seam to the disk, segments, the index, and small files that are replaced atomically."""
