"""Background agents: tasks, loop, tools, edits, worktrees, sandbox, journal. Sees the engine only through engine/chat.py."""
