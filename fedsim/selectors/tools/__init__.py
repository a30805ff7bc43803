"""Algorithms shared by several selectors: inner products, similarities, clustering, subset search, queues."""
