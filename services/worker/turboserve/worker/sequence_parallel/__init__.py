"""Loans between two workers of one host: groups of two, the protocol of a loan, and its policy."""
