"""The toy world: renderer, sentences, judge and benchmark of the model that ships with TurboServe."""
