"""Named breakpoints, deadlines, signal handlers, and stacks of threads and asyncio tasks."""
