"""The process that hands metrics to TensorBoard, W&B and MLflow."""
