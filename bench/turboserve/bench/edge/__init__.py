"""Attacks on a server before anybody has logged in, and what its limits cost."""
