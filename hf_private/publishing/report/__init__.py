"""The report for a privacy officer: everything in it follows from the statement (privacy.json) and from `verify`.

content.py says what the report says, markdown.py and page.py how it looks. registry.py and cyclonedx.py say the same
in the form that two public formats ask for.
"""
