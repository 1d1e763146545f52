"""Reinforcement learning: rollouts of a policy in environments, advantages, data to train on. No loop lives here."""
