"""The parts of ``archive.py``: the differences of a range, the proof of ranges, and the report."""
