"""DOCTOR: one page on this installation and this project, without running the project."""
