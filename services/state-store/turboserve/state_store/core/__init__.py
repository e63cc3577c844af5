"""The rules of rows. Pure: functions take a record and a request, and return the new record and events."""
