"""Transactions: what is read, decided by the core, and written together; then what follows a commit."""
