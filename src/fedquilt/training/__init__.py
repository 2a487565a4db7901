"""What a client does with the subnets it is given."""
