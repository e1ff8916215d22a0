"""The lab: a question, its runs over seeds, and a page with the answer."""
