"""Servers that behave like the real ones: Google Cloud Storage and the Hugging Face hub, with faults on demand."""
