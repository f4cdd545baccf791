"""The OpenAI-compatible server over an engine; needs the extra `serve`."""
