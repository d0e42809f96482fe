"""What an engine does now: read from its process table and its schedulers, for HTTP and for people who look on."""

from weft.engine.watch.listener import Listener
from weft.engine.watch.reader import LiveReader, WatchedEngine, WatchedReplica

__all__ = ["Listener", "LiveReader", "WatchedEngine", "WatchedReplica"]
