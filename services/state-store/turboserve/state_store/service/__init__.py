"""Transactions, which read rows, apply the rules of the core and write, and the steps after a commit."""
