"""Device maths that both services share: target distribution, counter noise, acceptance, attention.

Knows tensors and token trees. Knows neither gRPC, nor models, nor the services. Import the module
you need; this file imports nothing, so that a light process can read `sampling` and `tree` without
torch.
"""
