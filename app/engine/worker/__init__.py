"""The worker process: holds one model, runs one command after another, measures.

Nothing here runs in the process that uses the engine. Importing this module imports no torch;
`main` does so when the first command comes.
"""

from app.engine.worker.loop import main

__all__ = ["main"]
