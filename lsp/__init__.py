"""One connected editor: protocol, documents, workspace edits. May import agent_tasks."""
