"""Data sets on disk and in code: read in blocks, looked at row by row, judged by what each fault would do to a batch."""

from whynan.forensics.data.looking import check_data, check_object
from whynan.forensics.data.recognising import recognise

__all__ = ["check_data", "check_object", "recognise"]
