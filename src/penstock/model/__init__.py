"""Networks shared by learner, inference and fleet."""
