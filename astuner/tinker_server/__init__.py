"""A local server with the API of tinker 0.20 to 0.38, for training loops written for the Tinker service.

Long requests return the id of a future, whose result the client polls. All models train in one thread, in request
order; each set of weights that is sampled has its own embedded engine.
"""
