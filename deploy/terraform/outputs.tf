output "bucket" {
  description = "Where checkpoints, the template and the watch's configuration lie."
  value       = google_storage_bucket.bucket.name
}

output "repository" {
  description = "Where the images lie."
  value       = "${var.region}-docker.pkg.dev/${var.project}/${google_artifact_registry_repository.images.repository_id}"
}

output "template" {
  description = "The Flex Template, once Cloud Build has made it."
  value       = "gs://${google_storage_bucket.bucket.name}/templates/weightbeam.json"
}

output "worker" {
  description = "Dataflow's workers run as this account."
  value       = google_service_account.worker.email
}

output "builder" {
  description = "Cloud Build runs as this account."
  value       = google_service_account.builder.email
}

output "hub_token" {
  description = "The secret that a version with the hub's token may be added to."
  value       = google_secret_manager_secret.hub_token.id
}

output "releases_webhook" {
  description = "The secret that a version with the URL of a webhook may be added to."
  value       = google_secret_manager_secret.releases_webhook.id
}

output "publish_token" {
  description = "The secret that a version with a token of the hub that may write may be added to."
  value       = google_secret_manager_secret.publish_token.id
}
