"""Readers of transcripts: functions over files that give typed records, in bounded memory; no database here.

`formats` finds out what a file is and names its sessions; a module for each format reads them; `records` says what a
record is, which events it becomes, and how it is built again from them.
"""
