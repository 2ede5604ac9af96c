"""Judges records: rates, roofs, bases, and later verdicts. Reads records only; never imports torch."""
