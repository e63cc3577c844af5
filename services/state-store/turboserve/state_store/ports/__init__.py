"""What the state store needs of its servers: typed protocols, each implemented for real and in memory."""
