"""TELL: one file per form, all fed by Incident."""
