"""The report as one HTML page: templates as package data, and the values that fill them."""
