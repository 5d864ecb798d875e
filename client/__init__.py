"""The client of a storage worker. It imports neither the worker nor its SQLite driver."""

from .client import Client
from .connection import Connection
from .dial import AddressDialer, Dialer
from .pipe import Pipe
from .pipeline import Pipeline, PipelineFuture
from .transaction import InteractiveTransaction

__all__ = [
    "AddressDialer",
    "Client",
    "Connection",
    "Dialer",
    "InteractiveTransaction",
    "Pipe",
    "Pipeline",
    "PipelineFuture",
]
