"""What a trained model's parameters say of how it generalizes (Mądry, Optimization and Generalization Challenges in
Deep Learning, lecture 3 of 6.S979): each measure in a file of its own, as a library for any torch loss."""
