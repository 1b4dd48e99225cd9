terraform {
  required_version = ">= 1.9" # a variable's validation names another variable

  required_providers {
    google = {
      source  = "hashicorp/google"
      version = "~> 7.0"
    }
  }
}

provider "google" {
  project = var.project
  region  = var.region
}
