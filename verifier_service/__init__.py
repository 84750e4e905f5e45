"""The verifier: hosts the target model, decides what is kept of each proposal, answers clients."""
