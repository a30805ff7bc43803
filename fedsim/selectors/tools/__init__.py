"""What several methods share and a newcomer need not touch: products, searches, trees, queues."""
