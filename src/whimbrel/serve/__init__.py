"""The model over HTTP: OpenAI-compatible routes and a chat page."""
