"""The report as one HTML page: templates as package data, and what they are filled with."""
