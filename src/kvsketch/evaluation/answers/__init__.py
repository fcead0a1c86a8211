"""What methods do to a model's answers: questions on made-up documents, scores, means and pictures."""
