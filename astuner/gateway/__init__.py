"""An HTTP server through which OpenAI-compatible clients call the model in training."""
