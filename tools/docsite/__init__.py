"""The documentation site: pages of docs/, and pages made from code and results."""
