"""SETTINGS: what a user's own configuration should say, with the reason in numbers, as a diff that keeps its layout."""
