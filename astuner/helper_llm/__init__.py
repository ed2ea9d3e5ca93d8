"""The LLM that judges, data generation and learned rubrics ask."""
