// bare tiles: transposed, partly replicated, listed, and across two dimensions at once
module @f attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["_axis_0"=2, "_axis_1"=4]>
  sdy.mesh @mesh_0 = <["_axis_0"=4, "_axis_1"=2]>
  sdy.mesh @mesh_1 = <["_axis_0"=2, "_axis_1"=4], device_ids=[3, 1, 2, 0, 5, 4, 7, 6]>
  sdy.mesh @mesh_2 = <["_axis_0"=2, "_axis_1"=2, "_axis_2"=2]>
  sdy.mesh @mesh_3 = <["_axis_0"=8]>
  func.func public @main(%arg0: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"_axis_1"}, {"_axis_0"}]>}, %arg1: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}, {"_axis_0"}]>}, %arg2: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh_1, [{"_axis_0"}, {"_axis_1"}]>}, %arg3: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_2, [{"_axis_2", "_axis_1", "_axis_0"}]>}) -> (tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh_3, [{"_axis_0"}, {}]>}, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8xf32>) {
    return %arg0, %arg1, %arg2, %arg3 : tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8xf32>
  }
}
