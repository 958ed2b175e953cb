"""Joins the rooms: stands at torch's doors, notices, has the step diagnosed, and acts."""
