"""The database: the only user of the SQLite driver, apsw.

`connection` runs statements and transactions, `opening` makes connections, `guard` decides what SQL may
do, `faults` turns the driver's errors into ours, `files` watches the files that are open.
"""
